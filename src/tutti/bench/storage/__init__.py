"""What `tutti bench storage` measures: slow servers, restores, disks, months of failures."""
