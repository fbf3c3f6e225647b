"""The run loop and its policy: rounds, schedules, rejection, composition of rewards."""
