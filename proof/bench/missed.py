"""Why a target is missed where it is: printed on the page beside the figure, and only then."""

WHY = {
    "coordinator/1-producer": (
        "a commit of one producer is a chain of messages between processes, one after the other, and ours pass through "
        "Python and gRPC at either end (0.16 ms for a bare message and its answer). It depends on the processor: 1.6 "
        "on an AMD EPYC, 1.2 on an Intel Xeon."
    ),
    "coordinator/32-producers": (
        "on an Intel Xeon a commit takes 310 µs of processor time in the coordinator, 210 in the client and 220 in the "
        "broker. Nearly all of what the first two take is Python's interpreter, spread over the whole path (deciding, "
        "encoding and checking an id's record 35 % of the coordinator's, manifests 13, appends 12, conversions 7); "
        "gRPC's own code is 2 % of all, protobuf's 6. Batches of a dozen commits move from process to process, so that "
        "the two cores are used to 77 %. More producers make larger batches, not more of them: with 64 and 128 a "
        "commit takes the coordinator 16 and 29 % less time, and the cores are used to 75 and 71 %. Smaller batches "
        "(six commits in a message) use them to 93 % and take a quarter more time per commit; two or four connections "
        "to the log, a single log partition, manifests that wait for answers, and processes bound to cores all gave "
        "the same rate within 5 %, two instances 8 % more. "
        "Deciding and encoding compiled with mypyc take 5 % less: reading the records' fields is what costs there. An "
        "interpreter built with profiles is 12 % faster, and so is the other side with it."
    ),
    "ids/load-slowdown": (
        "at half of the rate that the coordinator can do, it, the broker and the clients use 146 % of the two cores, "
        "for fewer commits share a message; the process that loads takes 24 % more, and at 170 % of 200 all wait "
        "longer for their turn. It has a low priority and rests two thirds of the time. The lowest priority that Linux "
        "has changed nothing; resting more makes those wait whose ids are loaded, now 28 s for 900,000 of them."
    ),
    "idle/sessions-1000": (
        "a thousand connections answer 50 heartbeats a second and gRPC's own pings: 2.0 on an Intel Xeon, 6.1 on a "
        "slow AMD EPYC, on which Kafka's own coordinator does a third of the commits, too. Nearly half of what is "
        "spent in Python goes into gRPC's write of the answer, on a connection that has been silent for 20 s."
    ),
    "producer/vs-confluent": (
        "each record is a call in Python, which costs as much as librdkafka does with it: it depends on the processor, "
        "from 0.8 on an AMD EPYC to 1.4 on an Intel Xeon."
    ),
    "producer/txn-vs-ordered": (
        "the rounds of a quick run differ by more than the 3 % in question: 0.88 to 1.3 in one run on an AMD EPYC, and "
        "1.4 for the median of seven rounds on the same machine, half an hour later."
    ),
    "reconcile/end-to-end-100000": (
        "nearly all of it is Java: Spark's start, and each query's plan and generated code for the first time. 14 s on "
        "an Intel Xeon, 25.5 on a slow AMD EPYC."
    ),
    "relay/transaction-vs-partition": (
        "the manifest of each transaction is read and its records are found in Python, under the same interpreter lock "
        "as the rows are made; what is whole leaves together, which takes a third of the time that one by one took. On "
        "an AMD EPYC it was 0.69 to 0.94."
    ),
    "reverse/latency-p99": (
        "it depends on the machine: 18 ms on an Intel Xeon, 58 on a slow AMD EPYC that the producer of the rows, the "
        "relay, the coordinator, the broker and the consumer share."
    ),
}
