"""Bodies of OpenAI's and Anthropic's API: what of a request is served, and its answer."""
