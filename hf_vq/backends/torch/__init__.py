"""Ops in PyTorch alone: any device."""
