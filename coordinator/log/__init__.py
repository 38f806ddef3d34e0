"""The replicated log: one compacted Kafka partition per shard, and the feed partition that belongs to it.

codec      records <-> bytes
port       what a store of partitions must do (read, append as a given writer)
replay     fold(log): records -> the state of a partition
lead       taking a partition over, and writing it as its only leader
kafka      the store that is Kafka
reading    how it reads, in threads
consumer   one consumer in such a thread
packer     how it reads what is long: in a process of its own
"""
