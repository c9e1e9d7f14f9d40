"""Programs that people really have, measured by one command: see `README.md` in this folder."""
