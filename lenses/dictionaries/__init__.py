"""Sparse dictionaries of a site (sparse autoencoders): read, applied, trained and judged."""
