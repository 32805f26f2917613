"""The named families of schedules. Each is a function of sizes that returns a `Schedule`."""
