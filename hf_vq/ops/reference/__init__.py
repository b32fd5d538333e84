"""The specification of every op, in float32, as the papers write it."""
