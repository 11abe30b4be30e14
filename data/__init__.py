"""Labelled sets built from registry packages, and the run folder."""
