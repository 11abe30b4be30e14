"""Plotly figures from tables and tensors; no model."""
