"""Random split calls of everything public, each held to a loop in fp64.

    python -m tests.fuzz --cases 10000 --seed 0 --record fuzz.json

case        what is drawn: plain values, one line of JSON, from which every number follows
draw        cases by a seed
shrink      smaller cases that still fail
problem     what a case asks: tensors, how they are split, the split call and the truth
recurrences, softmax, local, moves, grids, decoding, resuming, training, bits     the problems of each kind of operation
symmetric   messages by memory that ranks share, as files
strides     how tensors lie in memory
rounding    a budget for low precision: the fp64 loop again, every step of it rounded
in_rank     what a rank does with cases: the truth of its share, every split call, what is off
judge       cases given to the pool of ranks; what they answer
"""
