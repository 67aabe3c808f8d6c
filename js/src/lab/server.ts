/** Request from gpumagic's part of the server, and give the stream access to the browser. */

import { ServerConnection } from '@jupyterlab/services';
import type { Environment } from './stream.js';

/** How long an answer may take; a stalled driver does not stall the server. */
const TIMEOUT_MS = 20_000;

/** The server answered with an error. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** The module js/src/panel.ts, which the server serves. */
type PanelModule = typeof import('../panel.js');

/** The server's address, token and XSRF cookie. */
export class Api {
  #settings: ServerConnection.ISettings;

  constructor(settings: ServerConnection.ISettings) {
    this.#settings = settings;
  }

  get<T>(path: string): Promise<T> {
    return this.#request(path, {});
  }

  post<T>(path: string, body: unknown): Promise<T> {
    return this.#request(path, { method: 'POST', body: JSON.stringify(body) });
  }

  /** Import the monitor. A browser caches a failure: `attempt` makes the address unique. */
  monitor(attempt: number): Promise<PanelModule> {
    const { baseUrl, token, appendToken } = this.#settings;
    const url = new URL(address(baseUrl, 'monitor.js'), location.href);
    if (attempt) url.searchParams.set('attempt', `${attempt}`);
    if (appendToken && token) url.searchParams.set('token', token);
    return import(/* webpackIgnore: true */ /* @vite-ignore */ url.href);
  }

  /** Open a socket of the stream. */
  socket(): WebSocket {
    const { wsUrl, token, appendToken, WebSocket: Socket } = this.#settings;
    const query = appendToken && token ? `?token=${encodeURIComponent(token)}` : '';
    return new Socket(address(wsUrl, 'stream') + query);
  }

  async #request<T>(path: string, init: RequestInit): Promise<T> {
    const response = await ServerConnection.makeRequest(
      address(this.#settings.baseUrl, path),
      { ...init, signal: AbortSignal.timeout(TIMEOUT_MS) },
      this.#settings,
    );
    const body = await response.json().catch(() => null);
    if (response.ok) return body;
    throw new Refused(response.status, body?.message || response.statusText);
  }
}

/** Return an address below the server's base URL, which JupyterHub and proxies change. */
const address = (base: string, path: string): string =>
  `${base.replace(/\/+$/, '')}/gpumagic/api/${path}`;

/** Return the stream's access to the server and the browser. */
export const environment = (api: Api): Environment => ({
  socket: () => api.socket(),
  get: (path) => api.get(path),
  hidden: () => document.hidden,
  watch(changed) {
    document.addEventListener('visibilitychange', changed);
    window.addEventListener('online', changed);
  },
  after(milliseconds, then) {
    const timer = setTimeout(then, milliseconds);
    return () => clearTimeout(timer);
  },
  now: () => performance.now(),
  random: Math.random,
});
