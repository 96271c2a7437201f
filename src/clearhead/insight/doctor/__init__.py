"""The doctor: examines a user's module from outside and reports its faults."""
