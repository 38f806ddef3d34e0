"""The gateway: transactions for any language with gRPC, on the client library's own producer.

service.py is the door; stream.py and holders.py serve Transact, batches.py and tokens.py CommitBatch; convert.py and
tokens.py are pure.
"""
