"""Real parts, real faults, and a checker over everything that anybody was told or has seen."""
