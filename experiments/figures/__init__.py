"""Results drawn: a file per study, all of them through `plotting.py`."""
