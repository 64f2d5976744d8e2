"""`hicache serve`: the scheduler behind the HTTP interface of OpenAI.

    client <-> app (asyncio) -> frontend -> commands -> engine thread: scheduler, runner, engine
                                frontend <- tokens, outcomes <-

One thread owns engine, scheduler and runner. Everything else runs on the event loop. Two queues connect them: commands
go to the thread, bounded by the number of requests that are open, and tokens come back once a step.
"""
