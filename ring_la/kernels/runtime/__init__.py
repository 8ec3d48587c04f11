"""Launching kernels, Triton's and those in CUDA C++, for the whole package; whole calls written down and replayed.

    launch              the one way to launch a kernel; `aligned` tensors
    contract            what a launch promises of its arguments, and the check of it that tests turn on
    triton_version      what of Triton is not its language: versions, launchers, what it specialises on
    streams             `SideStream`, launches `aside` on it, and `order`, which is replayed too
    strided             tensors that lie apart as direct launches take them
    cuda_kernel         `CudaKernel`: a kernel in CUDA C++, compiled when first launched
    early               kernels that begin before the launch before them has ended
    zeros               numbers that are zero at first, for such a kernel

    observer            who hears of launches while they are made
    recorder            `Recorder`, an observer: it watches the steps of a call and makes a tape of each
    tape                `Tape`: one step's allocations, launches and operations, on tensors by number, to be done again;
                        `Playback`: those tensors in one replay; `StepRecord`: what is known of a step, its tape too
    written             a tape as one function, whose code is written for it
    replayed_function   the same for a function of one step: `replayed`, a decorator, and `replayed_call`

To *record* is to do a call and write down what it did; to *play* a tape is to do that again on other tensors; a call is
*replayed* when all its steps are played.
"""
