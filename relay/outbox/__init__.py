"""PostgreSQL → Kafka: what services write into their outbox table reaches Kafka exactly once, in commit order."""
