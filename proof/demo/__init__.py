"""The demonstration: a bank on Kafka that loses a coordinator on the way and no money."""
