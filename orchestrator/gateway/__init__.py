"""The gateway: takes a trainer's batch, has it completed by the rollout nodes that hold its policy, nobody else.

`members` keeps the table of `policies.membership` alive, `upstream` talks to one vLLM, `dispatch` sees a batch
through, `app` is the HTTP surface, `__main__` the process. What is said over HTTP is in `policies.wire`. It keeps
nothing on disk but its address in the run's store: started anew, it hears from nodes and trainer what it must
know.
"""
