/** The one door to the server's part of gpumagic: its address, token and XSRF cookie. */

import { ServerConnection } from '@jupyterlab/services';
import type { Renderer } from './deferred.js';
import { Refused } from './refused.js';

/** How long an answer may take; the driver may stall, but never the server. */
const PATIENCE_MS = 20_000;

export class Api {
  #settings: ServerConnection.ISettings;

  constructor(settings: ServerConnection.ISettings) {
    this.#settings = settings;
  }

  get(path: string): Promise<unknown> {
    return this.#request(path, {});
  }

  post(path: string, body: unknown): Promise<unknown> {
    return this.#request(path, { method: 'POST', body: JSON.stringify(body) });
  }

  /** The code of the monitor. */
  renderer(attempt: number): Promise<Renderer> {
    const query = new URLSearchParams(attempt ? { attempt: `${attempt}` } : {});
    if (this.#settings.appendToken && this.#settings.token) {
      query.set('token', this.#settings.token);
    }
    const url = new URL(address(this.#settings.baseUrl, 'monitor.js'), location.href);
    url.search = `${query}`;
    return import(/* webpackIgnore: true */ /* @vite-ignore */ url.href);
  }

  /** A new socket of the stream, which begins to connect at once. */
  socket(): WebSocket {
    const { wsUrl, token, appendToken, WebSocket: Socket } = this.#settings;
    const query = appendToken && token ? `?token=${encodeURIComponent(token)}` : '';
    return new Socket(address(wsUrl, 'stream') + query);
  }

  async #request(path: string, init: RequestInit): Promise<unknown> {
    const response = await ServerConnection.makeRequest(
      address(this.#settings.baseUrl, path),
      { ...init, signal: AbortSignal.timeout(PATIENCE_MS) },
      this.#settings,
    );
    const body = await response.json().catch(() => null);
    if (response.ok) return body;
    throw new Refused(response.status, body?.message || response.statusText);
  }
}

/** base_url is where JupyterHub or a proxy has put the server. */
function address(base: string, path: string): string {
  return `${base.replace(/\/+$/, '')}/gpumagic/api/${path}`;
}
