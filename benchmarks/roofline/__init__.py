"""The limits of the machine: reading bytes and nothing else, and products of small matrices."""
