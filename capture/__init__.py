"""Attach to a running transformer: find its parts, read and edit its sites, keep activations."""

from microtome.capture.activations import Activations as Activations
from microtome.capture.anatomy import Anatomy as Anatomy
from microtome.capture.collect import capture as capture
from microtome.capture.collect import estimate_capture as estimate_capture
from microtome.capture.dissect import NotDissectable as NotDissectable
from microtome.capture.dissect import dissect as dissect
from microtome.capture.generated import Generation as Generation
from microtome.capture.hooks import attach as attach
from microtome.capture.hooks import detach as detach
from microtome.capture.live_taps import EditContext as EditContext
from microtome.capture.models import LoadedModel as LoadedModel
from microtome.capture.models import load_model as load_model
from microtome.capture.positions import Span as Span
from microtome.capture.sites import KINDS as KINDS
from microtome.capture.sites import Site as Site
from microtome.capture.store import Store as Store
from microtome.capture.store_check import StoreInfo as StoreInfo
from microtome.capture.store_check import store_info as store_info
from microtome.capture.store_check import verify_store as verify_store
from microtome.capture.store_export import export as export
from microtome.capture.store_merge import merge_stores as merge_stores
from microtome.capture.tap_plan import Edit as Edit
from microtome.capture.tap_plan import Read as Read
from microtome.capture.taps import Tape as Tape
from microtome.capture.taps import TapNeverFired as TapNeverFired
from microtome.capture.taps import taps as taps
