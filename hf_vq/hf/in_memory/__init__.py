"""Quantizing modules that are in memory, and files of those that are not of Transformers."""
