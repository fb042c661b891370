"""One file per kind of device; only these know the names of vendors' torch plug-ins."""
