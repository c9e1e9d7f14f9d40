"""Realistic programs, measured by one command; see `README.md` in this folder."""
