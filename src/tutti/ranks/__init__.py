"""What any job on ranks needs: places, links, processes, devices, clocks, events."""
