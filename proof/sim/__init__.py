"""The whole coordinator on one seeded scheduler: the real code of several instances on simulated brokers and clients.

No real I/O, no real time: the same seed gives the same run. Faults in a safety phase, then everything heals and all
must finish in bounded (virtual) time; what happened is a history that `proof.checker` judges.

Left to tests on real parts: gRPC and the API, the consumer group and the peers (here leadership is told, rightly or
wrongly), the search for hanging transactions (here it ends what came late to another topic of the same name, no
more), and brokers that forget a producer id after a day.
"""
