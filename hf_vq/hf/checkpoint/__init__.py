"""A model's files: read before loading, written whole, verified."""
