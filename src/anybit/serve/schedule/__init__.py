"""What runs next, and where in the KV-cache: no model, no clock, no thread."""
