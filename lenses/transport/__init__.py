"""Activation transport: what a linear map carries through the residual stream, and what blocks make anew."""
