"""Short programs that use specrej, to be copied; `make example NAME=vote` runs one."""
