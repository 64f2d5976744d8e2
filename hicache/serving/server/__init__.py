"""`hicache serve`: a server with OpenAI's HTTP interface over the reference scheduler.

    client <-> app (asyncio) -> frontend -> commands -> engine thread: scheduler, runner, engine
                                frontend <- tokens, outcomes <-

One thread owns engine, scheduler and runner. All other work runs on the event loop. Two queues connect event loop and
thread. One has commands to the thread, and is limited by the number of open requests. The other has tokens from the
thread, delivered once a step.
"""
