"""The server: many texts at once from one engine, a width for every request, over HTTP."""
