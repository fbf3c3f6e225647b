"""The documents as a site: `make docs`."""
