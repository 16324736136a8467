"""Conversations as text: a model's template and forms, functions to call, forms that an answer is held to."""
