"""Short programs that use specrej, to be copied; `make example NAME=batch` runs one."""
