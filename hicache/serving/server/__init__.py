"""`hicache serve`: the scheduler behind the HTTP interface of OpenAI.

    client <-> app (asyncio) -> frontend -> commands -> engine thread: scheduler, runner, engine
                                frontend <- tokens, outcomes <-

One thread owns engine, scheduler and runner. All other work is on the event loop. Two queues connect them: commands to
the thread, limited by the number of open requests, and tokens from it, once a step.
"""
