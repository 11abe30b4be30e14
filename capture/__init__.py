"""Attach to a running transformer: find its parts, read and edit its sites, keep activations."""
