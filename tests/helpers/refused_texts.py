"""Texts that must be refused: each has one thing that cannot be compiled, or not for every device."""

import functools

import numpy as np

from mindformers_adaptive.rules.backend import float32, int32, where

TWO, TABLE = 2.0, np.arange(4)


def branch(loss_scale, overflow):
    if overflow:
        return {"loss_scale": loss_scale * TWO}
    return {"loss_scale": loss_scale}


def inner_branch(loss_scale, overflow):
    return {"loss_scale": loss_scale if overflow else loss_scale * TWO}


def loop(loss_scale):
    for _ in TABLE:
        loss_scale = loss_scale * TWO
    return {"loss_scale": loss_scale}


def endless_loop(loss_scale):
    while loss_scale < TWO:
        loss_scale = loss_scale * TWO
    return {"loss_scale": loss_scale}


def list_of(loss_scale):
    return {"loss_scale": [loss_scale for _ in TABLE]}


def flags_with_and(loss_scale, overflow):
    return {"loss_scale": where(overflow and loss_scale > TWO, TWO, loss_scale)}


def flags_with_or(loss_scale, overflow):
    return {"loss_scale": where(overflow | (loss_scale > TWO), TWO, loss_scale)}


def flags_with_not(loss_scale, overflow):
    return {"loss_scale": where(not overflow, TWO, loss_scale)}


def flags_with_tilde(loss_scale, overflow):
    return {"loss_scale": where(~overflow, TWO, loss_scale)}


def power(loss_scale):
    return {"loss_scale": loss_scale**TWO}


def remainder(loss_scale):
    return {"loss_scale": loss_scale % TWO}


def bare_number(loss_scale):
    return {"loss_scale": loss_scale * 2.0}


def of_numpy(loss_scale):
    return {"loss_scale": np.log2(loss_scale)}


def of_python(loss_scale):
    return {"loss_scale": max(loss_scale, TWO)}


def unknown_name(loss_scale):
    return {"loss_scale": loss_scale * nothing}  # noqa: F821


def three_at_once(loss_scale, overflow):
    return {"loss_scale": where(TWO < loss_scale < float32(8), TWO, loss_scale)}


def inner_function(loss_scale):
    double = lambda scale: scale * TWO  # noqa: E731
    return {"loss_scale": double(loss_scale)}


def element(loss_scale):
    return {"loss_scale": loss_scale * TABLE[int32(0)]}


def changed_in_place(loss_scale):
    loss_scale *= TWO
    return {"loss_scale": loss_scale}


def helper_with_branch(scale):
    return scale if scale > TWO else TWO


def calls_helper(loss_scale):
    return {"loss_scale": helper_with_branch(loss_scale)}


@functools.cache
def decorated(loss_scale):
    return {"loss_scale": loss_scale}


def plain(function):
    @functools.wraps(function)
    def wrapped(*arguments):
        return function(*arguments)

    return wrapped


def printing(loss_scale):
    print(loss_scale)
    return {"loss_scale": loss_scale}


@plain
def wrapped(loss_scale):
    return {"loss_scale": loss_scale}


by_lambda = lambda loss_scale: {"loss_scale": loss_scale}  # noqa: E731
