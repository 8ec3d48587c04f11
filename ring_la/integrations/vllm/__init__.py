"""ring_la reads long prompts for vLLM: a group of ranks reads, vLLM goes on from what they leave in its own memory.

    torchrun --nproc_per_node 4 -m ring_la reader MODEL --listen unix:/tmp/reader.sock

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RingLAConnector", "kv_role": "kv_consumer",
        "kv_connector_module_path": "ring_la.integrations.vllm.connector",
        "kv_connector_extra_config": {"reader": "unix:/tmp/reader.sock"}}'

    parcels     what a rank hands over, as text
    memory      memory that a rank lays it into and a worker of vLLM maps
    hosts       the same for workers on other hosts, by NIXL
    asking      HTTP from vLLM's side; `ring_la.serving.reader` is the other
    pages       from what ranks hand over into the pages of vLLM's layers
    states      how these keep recurrences and convolutions
    scheduling  the scheduler's side: which prompts come from the reader
    fetching    a worker's side: prompts into its memory
    connector   vLLM's interface, the only module that imports vLLM

Requests and answers are JSON and raw numbers, handles of memory too; nothing is unpickled.
"""
