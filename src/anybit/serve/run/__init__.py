"""The threads that have a model, and what is asked of them."""
