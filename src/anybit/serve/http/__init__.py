"""The server's addresses: who may ask, what is answered where, the page."""
