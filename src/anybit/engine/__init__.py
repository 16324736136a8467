"""The native engine: from a model's description to logits, from logits to text."""
