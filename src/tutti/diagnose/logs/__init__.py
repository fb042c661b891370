"""Why a job failed, from the logs of any framework."""
