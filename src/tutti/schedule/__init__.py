"""Pipeline schedules as instruction lists made from a Plan, and the proof that they cannot hang."""
