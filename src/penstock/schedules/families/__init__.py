"""The named families of schedules, each a function of sizes."""
