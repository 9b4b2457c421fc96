"""LangGraph with its SQLite checkpointer. The loop is a graph, and each node is a step.

Strength: the graph and the model are its subject, and a checkpoint can be read and rewound. It has
no inbox: the caller keeps the answer and resumes the thread by its id. `durability="sync"` writes
each checkpoint before the next node runs. A question and its `interrupt` are two nodes, because a
node runs again from its top.
"""

from typing import Any, TypedDict

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt


class State(TypedDict):
    known: list[str]
    step: str


def graph_of(world: Any, id: str) -> StateGraph[Any]:
    async def model(state: State) -> dict[str, Any]:
        return {"step": await world.model(state["known"])}

    async def ask(state: State) -> None:
        await world.ask(state["step"].removeprefix("ask "))

    async def wait(state: State) -> dict[str, Any]:
        return {"known": [*state["known"], interrupt(state["step"].removeprefix("ask "))]}

    async def lookup(state: State) -> dict[str, Any]:
        found = await world.lookup(state["step"].removeprefix("lookup "))
        return {"known": [*state["known"], found]}

    async def refund(state: State) -> None:
        await world.refund(id)

    graph: StateGraph[Any] = StateGraph(State)
    for node in (model, ask, wait, lookup, refund):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: state["step"].split()[0])
    for source, target in (("ask", "wait"), ("wait", "model"), ("lookup", "model")):
        graph.add_edge(source, target)
    return graph


async def run(world: Any, store: str, id: str) -> None:
    config: Any = {"configurable": {"thread_id": id}}
    async with AsyncSqliteSaver.from_conn_string(store) as checkpoints:
        graph = graph_of(world, id).compile(checkpoints)
        new = not (await graph.aget_state(config)).values
        given: Any = {"known": [], "step": ""} if new else None  # None: go on from the checkpoint
        while asked := (await graph.ainvoke(given, config, durability="sync")).get("__interrupt__"):
            given = Command(resume=await world.answer(asked[0].value))
