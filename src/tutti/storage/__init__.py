"""Bytes beyond the process: disks that are measured, files at URLs that are read and written."""
