"""Weights from the trainer to the engines: in buckets, with a version, verified.

sync = make_weight_sync(args)                          one per trainer rank, kept for the run
report = sync.update(hf_buckets, engines, version)     every rank calls it, with its own iterator

         rank 0                           all ranks                          rank 0
pause ──▶ begin session ──▶ for each bucket: gather, cast, send ──▶ end ──▶ flush ──▶ compare
                                  TensorTransport        shared memory, CUDA IPC   checksums and
                                  DistributedTransport   gloo, NCCL broadcast      version, then
                                  DiskTransport          Hugging Face folder       continue
"""
