"""Edits and controllers over the taps of microtome.capture. Nothing here yet."""
