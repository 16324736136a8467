"""The native engine: from logits to text. It needs numpy and tokenizers, neither torch nor Transformers."""
