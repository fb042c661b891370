"""What a draft takes: tables of units, the pipeline recurrence, the simulator, the objective."""
