"""The records as Markdown tables."""
